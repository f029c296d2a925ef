"""One draft: the session, trees, and how a token is chosen."""
