"""What is made offline from text, prompts and weights, before anything is drafted."""
