"""What speed to expect of a pair before anything is built for it, and with which settings."""
