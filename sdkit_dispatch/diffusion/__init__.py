"""Text to image without PyTorch: tokenizer, schedulers, denoising loop and image files in numpy.

Nothing here knows a vendor: the graphs of a pipeline are run through `contract.Session`.
"""
