"""Tokenizers: bytes, Hugging Face, tiktoken, SentencePiece."""
