"""Inference servers that other people have started, of vLLM or SGLang, as generators of a run. No torch."""
