"""This room holds what whole models show: tables over all architectures, and the time of whole steps."""
