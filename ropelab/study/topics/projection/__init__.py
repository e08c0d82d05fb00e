"""The projection that rotates, and its law: chapter 08."""
