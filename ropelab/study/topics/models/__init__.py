"""The results on whole models: tables over all architectures, and the time of whole steps."""
