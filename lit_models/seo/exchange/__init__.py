"""Retrievers and rankers in the layouts of other programs: sentence-transformers, ONNX."""
