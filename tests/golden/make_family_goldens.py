"""Compute the golden files of the model families beyond plain Llama: what transformers and PEFT compute.

    python make_family_goldens.py [--out DIR] [--fixtures DIR] [--only NAME ...]     (defaults: this folder, ../fixtures, all)

The helpers and the settings (f32, one CPU thread, eager attention) are those of make_llama_goldens.py.
"""

import torch
from make_llama_goldens import (
    TOKENS,
    forward_tensors,
    gradients_on_disk,
    make_full_gradients,
    make_generation,
    make_lora,
    make_packed,
    maker_from_arguments,
    random_ids,
)
from transformers import LlamaConfig, LlamaForCausalLM

# Lengths of documents where layers carry something from token to token: some shorter than a convolution reaches, so that several lie within its
# reach, and some longer. Those of a recurrent rule are also longer than one and than two of the chunks of 64 tokens that it is computed in.
SHORT = [3, 1, 2, 1, 17, 24]
CHUNKED = [3, 1, 70, 131]

# Seeds of the ids for logits and full gradients, of those with the adapter, of the packed sequence, of the prompts and of such documents.
FAMILIES = {
    "tiny-llama-bias": dict(ids=401, lora=411, packed=421, prompts=[437, 434]),
    "tiny-mistral": dict(ids=402, lora=412, packed=422, prompts=[435, 442]),
    "tiny-qwen2": dict(ids=403, lora=413, packed=423, prompts=[437, 434]),
    "tiny-qwen3": dict(ids=404, lora=414, packed=424, prompts=[442, 446]),
    "tiny-olmo2": dict(ids=406, lora=416, packed=426, prompts=[457, 464]),
    "tiny-phi3": dict(ids=407, lora=417, packed=427, prompts=[466, 479]),
    "tiny-smollm3": dict(ids=408, lora=418, packed=428, prompts=[463, 453]),
    "tiny-gemma2": dict(ids=410, lora=419, packed=429, prompts=[466, 439]),
    "tiny-gemma3": dict(ids=452, lora=420, packed=430, prompts=[484, 465]),
    "tiny-mixtral": dict(ids=516, lora=520, packed=649, prompts=[444, 434]),
    "tiny-qwen3-moe": dict(ids=528, lora=522, packed=642, prompts=[443, 448]),
    "tiny-gpt-oss": dict(ids=651, lora=561, packed=560, prompts=[439, 435]),
    "tiny-qwen2-moe": dict(ids=841, lora=853, packed=859, prompts=[433, 432]),
    "tiny-glm4-moe": dict(ids=2005, lora=2004, packed=2006, prompts=[430, 433]),
    "tiny-olmo3": dict(ids=530, lora=540, packed=550, prompts=[430, 433]),
    "tiny-granite": dict(ids=531, lora=541, packed=551, prompts=[430, 431]),
    "tiny-gemma": dict(ids=537, lora=542, packed=552, prompts=[430, 434]),
    "tiny-glm": dict(ids=538, lora=545, packed=555, prompts=[430, 437]),
    "tiny-glm4": dict(ids=533, lora=543, packed=553, prompts=[436, 435]),
    "tiny-ministral3": dict(ids=534, lora=544, packed=554, prompts=[439, 430]),
    "tiny-lfm2": dict(ids=1000, lora=7000, packed=3002, prompts=[430, 431], documents=(5000, SHORT)),
    "tiny-lfm2-moe": dict(ids=1007, lora=7000, packed=3002, prompts=[430, 435]),
    "tiny-lfm3": dict(ids=1000, lora=7000, packed=3002, prompts=[430, 430], documents=(5000, SHORT)),
    "tiny-qwen3-5": dict(ids=1000, lora=7000, packed=3002, prompts=[434, 431], documents=(5000, CHUNKED)),
    "tiny-qwen3-5-moe": dict(ids=1063, lora=7009, packed=3011, prompts=[434, 430]),
    "tiny-olmo-hybrid": dict(ids=1000, lora=7000, packed=3002, prompts=[430, 431], documents=(5000, CHUNKED)),
    "tiny-qwen3-next": dict(ids=1000, lora=7016, packed=3005, prompts=[438, 433]),
    "tiny-gemma4": dict(ids=1000, lora=7000, packed=3002, prompts=[433, 431]),
    "tiny-gemma4-dense": dict(ids=1000, lora=7000, packed=3002, prompts=[513, 448]),
    "tiny-gemma4-moe": dict(ids=1004, lora=7048, packed=3004, prompts=[442, 435]),
    "tiny-gemma4-unified": dict(ids=1000, lora=7000, packed=3002, prompts=[471, 431]),
}

# The same for text models with a vision tower, given text only. Gradients have the names of the text model alone.
WRAPPERS = {
    "tiny-gemma3-vl": dict(ids=701, lora=711, packed=721, prompts=[768, 747]),
    "tiny-mistral3": dict(ids=710, lora=712, packed=722, prompts=[755, 731]),
    "tiny-qwen2-5-vl": dict(ids=707, lora=713, packed=723, prompts=[766, 734]),
    "tiny-qwen3-vl": dict(ids=708, lora=714, packed=724, prompts=[738, 757]),
    "tiny-qwen3-5-vl": dict(ids=1000, lora=7000, packed=3002, prompts=[436, 437]),
    "tiny-qwen3-5-moe-vl": dict(ids=1024, lora=7019, packed=3009, prompts=[437, 432]),
    "tiny-gemma4-vl": dict(ids=1000, lora=7000, packed=3002, prompts=[430, 431]),
    "tiny-gemma4-unified-vl": dict(ids=1000, lora=7000, packed=3002, prompts=[442, 432]),
}

# Adapters of experts' parameters, each with its base and the seed of its ids.
PARAMETER_ADAPTERS = {
    "tiny-qwen3-moe-parameters": ("tiny-qwen3-moe", 560),
    "tiny-mixtral-parameters": ("tiny-mixtral", 909),
    "tiny-gpt-oss-parameters": ("tiny-gpt-oss", 912),
    "tiny-gemma4-moe-parameters": ("tiny-gemma4-moe", 1000),
}

# Seeds of the ids for logits only.
SPECIAL_CHECKPOINTS = {"tiny-phi3-long": 451}

# One prompt is shorter than the sliding window of tiny-mistral (12), the other is longer. The new ids reach beyond the
# window in both cases.
PROMPT_TOKENS = [7, 20]


@torch.no_grad()
def check_routing(model, input_ids):
    """No token is near a tie between its last expert and the next one, which would make the golden a test of rounding."""
    config = model.config.get_text_config()
    top_k = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None)
    logits_of_layers = model(input_ids, output_router_logits=True).router_logits if top_k else []
    if hasattr(config, "top_k_experts"):
        logits_of_layers = [probabilities.log() for probabilities in logits_of_layers]
    endings = ("e_score_correction_bias", "expert_bias")
    corrections = [buffer for name, buffer in model.named_buffers() if name.endswith(endings)]
    for layer, logits in enumerate(logits_of_layers):
        # Sigmoids are closer to each other than logits.
        scores, least = (logits.sigmoid() + corrections[layer], 0.001) if corrections else (logits, 0.01)
        if hasattr(model.config, "n_group"):
            groups = scores.unflatten(1, (model.config.n_group, -1))
            sums, chosen = groups.topk(2).values.sum(-1).sort(descending=True)
            assert gap(sums, model.config.topk_group) > least
            of_chosen = torch.arange(model.config.n_group) == chosen[:, : model.config.topk_group, None]
            scores = groups.masked_fill(~of_chosen.any(1)[:, :, None], -1.0).flatten(1)
        assert gap(scores.sort(descending=True).values, top_k) > least


def gap(values, count):
    """The least distance between the last of the `count` largest values and the next one."""
    return (values[:, count - 1] - values[:, count]).min()


def make_family(maker, name, seeds):
    model, input_ids = maker.base(name), random_ids(seeds["ids"])
    check_routing(model, input_ids)
    # In transformers the embedding row of the pad token gets no gradient from the input side (`padding_idx`). The
    # goldens leave that id out, so that they do not depend on this rule.
    assert model.config.get_text_config().pad_token_id not in input_ids, name
    maker.save(name, forward_tensors(model, input_ids))
    make_full_gradients(maker, name, seeds["ids"])
    make_lora(maker, f"{name}-lora", name, seeds["lora"])
    make_packed(maker, name, seeds["packed"])
    prompts = [random_ids(seed)[:1, :tokens] for seed, tokens in zip(seeds["prompts"], PROMPT_TOKENS)]
    make_generation(maker, name, prompts)
    if "documents" in seeds:
        make_documents(maker, name, *seeds["documents"])


def make_documents(maker, name, seed, lengths):
    """Documents of as few as one token, each alone: the logits that they must have packed into one sequence, and the gradients of the packed loss,
    which is the mean over the loss tokens of all. A document of one token has none."""
    model, ids = maker.base(name), random_ids(seed, shape=(sum(lengths),))
    logits, loss = [], 0.0
    for document in ids.split(lengths):
        logits.append(model(document[None]).logits)
        losses = torch.nn.functional.cross_entropy(logits[-1][0, :-1], document[1:], reduction="sum")
        loss += losses / (len(ids) - len(lengths))
    loss.backward()
    tensors = {f"grad.{name}": gradient for name, gradient in gradients_on_disk(model).items()}
    tensors["input_ids"] = ids[None]
    tensors["position_ids"] = torch.cat([torch.arange(length) for length in lengths])[None]
    tensors["cu_seqlens"] = torch.tensor([0, *lengths]).cumsum(0)
    maker.save(f"{name}-documents", dict(logits=torch.cat(logits, dim=1), loss=loss.reshape(1), **tensors))


@torch.no_grad()
def check_sliding_window(maker, name, seed):
    """Query t sees the keys s with t - window < s <= t: the last `window` keys, its own among them.

    The reference is plain Llama with the same weights and that mask. Without the window the logits are different."""
    mistral, input_ids = maker.base(name), random_ids(seed)
    shared = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    shared += ["num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "pad_token_id"]
    config = LlamaConfig(**{key: getattr(mistral.config, key) for key in shared}, attn_implementation="eager")
    llama = LlamaForCausalLM(config).eval()
    llama.load_state_dict(mistral.state_dict())
    query, key = torch.arange(TOKENS)[:, None], torch.arange(TOKENS)[None]
    seen = (key <= query) & (key > query - mistral.config.sliding_window)
    mask = torch.where(seen, 0.0, torch.finfo(torch.float32).min).expand(len(input_ids), 1, TOKENS, TOKENS)
    expected = mistral(input_ids).logits
    torch.testing.assert_close(llama(input_ids, attention_mask=mask).logits, expected)
    assert (llama(input_ids).logits - expected).abs().max() > 0.1, "the window must have an effect"


def main():
    names = [*FAMILIES, *WRAPPERS, *SPECIAL_CHECKPOINTS]
    maker = maker_from_arguments("make_family_goldens.py", __doc__, names)
    for name, seeds in {**FAMILIES, **WRAPPERS}.items():
        if name in maker.only:
            make_family(maker, name, seeds)
    for name, (base, seed) in PARAMETER_ADAPTERS.items():
        if base in maker.only:
            check_routing(maker.adapted(name, maker.base(base)), random_ids(seed))
            make_lora(maker, name, base, seed)
    for name, seed in SPECIAL_CHECKPOINTS.items():
        if name in maker.only:
            model = maker.base(name)
            maker.save(name, forward_tensors(model, random_ids(seed, min(262, model.config.vocab_size))))
    if "tiny-mistral" in maker.only:
        check_sliding_window(maker, "tiny-mistral", FAMILIES["tiny-mistral"]["ids"])


if __name__ == "__main__":
    main()
