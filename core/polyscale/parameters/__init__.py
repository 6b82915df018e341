"""Parameters: what is known of each, the store that assembles them, how they are made and compared between ranks."""
