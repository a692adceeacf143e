"""Train ONNX files: `sw.from_onnx` reads one as a trainable module, `save_onnx` writes it back."""

from shardwise.integrations.onnx.module import OnnxModule, from_onnx

__all__ = ["OnnxModule", "from_onnx"]
