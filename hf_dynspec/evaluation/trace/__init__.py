"""What a policy did for one prompt, round by round: what it took in, what came of it, and where time went."""
