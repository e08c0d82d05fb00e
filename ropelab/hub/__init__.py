"""The package for the Hugging Face hub."""
