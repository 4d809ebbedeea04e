"""Training and text generation with megamoe layers: a byte-level mixture-of-experts language model."""
