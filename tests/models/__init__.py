"""Every model of Transformers and diffusers, tiny and random: what it rotates, and what a patch changes."""
