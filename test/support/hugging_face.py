"""Small models of transformers: on devices and meshes, trained a little, and their logits on the host."""

import torch
import torch_xla
import torch_xla.distributed.spmd as xs

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
}


def config(name):
    """The configuration of a Llama with tied embeddings, or of a mixture of experts without."""
    import transformers

    if name == "llama":
        return transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    return transformers.MixtralConfig(**SMALL, num_local_experts=4, num_experts_per_tok=2, tie_word_embeddings=False)


def build(name, device="cpu"):
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config(name)).eval()


def specs(model, on):
    """A partition spec for each parameter with two dimensions."""
    return {key: (on.axis_names[0], on.axis_names[1]) for key, value in model.named_parameters() if value.ndim == 2}


def train(name, on):
    """A model on a mesh after a few steps that change every parameter."""
    model = build(name).to("xla")
    model.tie_weights()
    for key, spec in specs(model, on).items():
        xs.mark_sharding(model.get_parameter(key), on, spec)
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(3):
        sum((value - step).square().mean() for value in model.parameters()).backward()
        optim.step()
        optim.zero_grad()
        torch_xla.sync()
    return model


def on_host(model, name):
    """A host model with the values of a model on devices."""
    host = build(name)
    host.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    return host


def logits(model):
    tokens = torch.arange(24).reshape(2, 12)
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits
