"""A package for each document; `engine.claims` lists the modules of a document's package."""
