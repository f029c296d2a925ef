"""Parts of models for drafters and verification: the decoder, the dynamic head, the masks of trees."""
