"""Old names. A supervisor of the version before lives on through an upgrade and starts these by them."""
