"""Old module names: a supervisor that lives through an upgrade starts these programs by them."""
