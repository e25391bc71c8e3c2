"""The networks of Stable Diffusion at their real size, as diffusers and transformers have them."""

TEXT = {
    "vocab_size": 49408,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "projection_dim": 768,
    "max_position_embeddings": 77,
    "bos_token_id": 49406,
    "eos_token_id": 49407,
    "pad_token_id": 49407,
    "hidden_act": "quick_gelu",
}
WIDE_TEXT = {
    **TEXT,
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_attention_heads": 20,
    "projection_dim": 1280,
    "hidden_act": "gelu",
}
UNET = {
    "sample_size": 64,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 768,
    "attention_head_dim": 8,
    "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
    "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
}
WIDE_UNET = {
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "block_out_channels": (320, 640, 1280),
    "layers_per_block": 2,
    "cross_attention_dim": 2048,
    "attention_head_dim": (5, 10, 20),
    "transformer_layers_per_block": (1, 2, 10),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
    "down_block_types": ("DownBlock2D", *("CrossAttnDownBlock2D",) * 2),
    "up_block_types": (*("CrossAttnUpBlock2D",) * 2, "UpBlock2D"),
}
VAE = {
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
    "block_out_channels": (128, 256, 512, 512),
    "layers_per_block": 2,
    "down_block_types": ("DownEncoderBlock2D",) * 4,
    "up_block_types": ("UpDecoderBlock2D",) * 4,
    "sample_size": 512,
    "scaling_factor": 0.18215,
}
