"""A model's parts as drafters and verification both use them: the decoder, the dynamic head, the masks of trees."""
