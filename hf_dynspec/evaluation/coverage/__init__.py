"""What shortlists hold of the target's probability along texts, and what that is worth. No clock is involved."""
