"""This room holds a package for each document; `engine.claims` says what such a package contains."""
