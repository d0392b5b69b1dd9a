"""The cases of `bench-matrix` through PyTorch, bitsandbytes, transformers with PEFT, and Unsloth.

Called by `bench-matrix --peers` with one argument, a JSON file of cases; each result, and each package or case that is left out, is a line
of JSON on standard output. Warm-up, synchronization and fresh inputs are those of the matrix: samples end with a synchronization, inputs
together exceed the caches. Formats and sizes are those of the case; where a program multiplies in another way, its name says so.
Trade-off: eager PyTorch, no torch.compile: what a training script gets without further work.
"""

import importlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time

MAX_SETS, MAX_CALLS, SAMPLE_S = 32, 64, 1e-3


def first_line(error, length):
    return (str(error).splitlines() or ["no message"])[0][:length]


class Peers:
    def __init__(self, request, write, with_unsloth):
        self.write = write
        self.quick, self.on_gpu = request["quick"], request["on_gpu"]
        self.deadline = time.monotonic() + request["seconds"]
        self.torch = self.package("torch")
        self.device = "cpu"
        if self.torch is not None and self.on_gpu:
            if self.torch.cuda.is_available():
                self.device = "cuda"
            else:
                self.note("PyTorch finds no CUDA device: its times are of the processor and are left out.")
                self.torch = None
        # Before the others, of which it replaces parts when it is imported; so they are timed in a process without it.
        self.unsloth = self.package("unsloth") if self.torch and with_unsloth else None
        self.bitsandbytes = self.package("bitsandbytes") if self.torch else None
        self.transformers = self.package("transformers") if self.torch else None
        self.peft = self.package("peft") if self.transformers else None
        if self.torch:
            self.write({"device": self.torch.cuda.get_device_name() if self.device == "cuda" else "the processor"})
        self.fresh_bytes = 256e6 if self.on_gpu else 128e6
        self.target = 0.08 if self.quick else 0.5
        self.min_samples = 5 if self.quick else 20

    def package(self, name):
        try:
            module = importlib.import_module(name)
            self.write({"version": [name, importlib.metadata.version(name)]})
            return module
        except Exception as error:  # a package may fail to import for many reasons, and each is a note
            self.note(f"Python has no {name} that can be imported ({type(error).__name__}: {first_line(error, 120)}).")
            return None

    def note(self, text):
        self.write({"note": text})

    def wait(self):
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def samples(self, prepare, set_bytes):
        """Seconds per call; `prepare` builds a set of inputs and returns the call."""
        count = min(MAX_SETS, max(1, -int(-self.fresh_bytes // set_bytes))) if set_bytes else 1
        sets, turn = [prepare() for _ in range(count)], 0
        self.wait()

        def sample(calls):
            nonlocal turn
            started = time.perf_counter()
            for _ in range(calls):
                sets[turn % count]()
                turn += 1
            self.wait()
            return (time.perf_counter() - started) / calls

        sample(1)
        first = sample(1)
        warm = sample(2) if first < self.target else first
        calls = min(MAX_CALLS, max(1, -int(-SAMPLE_S // warm)))
        seconds, started = [], time.perf_counter()
        while True:
            seconds.append(sample(calls))
            elapsed = time.perf_counter() - started
            enough = elapsed >= self.target and len(seconds) >= self.min_samples
            if time.monotonic() > self.deadline or enough or len(seconds) >= 200 or (elapsed >= 4 * self.target and len(seconds) >= 3):
                return seconds

    def add(self, case, peer, prepare, set_bytes=0.0):
        try:
            samples = self.samples(prepare, set_bytes)
            self.write({"row": {"index": case["index"], "peer": peer, "samples": samples}})
        except Exception as error:  # one case that fails must not end the others
            what = f"{case['key']['subject']} {case['key']['pass']} {case['key']['format']}"
            self.note(f"{peer} failed at {what}: {type(error).__name__}: {first_line(error, 160)}")
        finally:
            if self.device == "cuda":
                self.torch.cuda.empty_cache()

    def random(self, *shape, dtype=None):
        return self.torch.rand(*shape, device=self.device, dtype=self.torch.float32).mul_(2).sub_(1).to(dtype or self.torch.float32)

    def run(self, case):
        key = case["key"]
        method = getattr(self, key["subject"], None)
        if self.torch is not None and method is not None:
            method(case, key["pass"], key["format"], key["sizes"])

    def dtype(self, name):
        return {"f32": self.torch.float32, "bf16": self.torch.bfloat16, "f16": self.torch.float16}.get(name)

    def peaks(self, asked):
        """Peak rates, measured as the matrix measures ours: the best of four rounds of some launches in a row."""
        torch, size, launches = self.torch, asked["gemm_size"], asked["launches"]

        def seconds(call):
            rounds = []
            for _ in range(5):
                self.wait()
                started = time.perf_counter()
                for _ in range(launches):
                    call()
                self.wait()
                rounds.append((time.perf_counter() - started) / launches)
            return min(rounds[1:])

        def square(name):
            if name != "fp8":
                x, w = [self.random(size, size, dtype=self.dtype(name)) for _ in range(2)]
                return lambda: x @ w.t()
            x, w = [self.random(size, size).to(torch.float8_e4m3fn) for _ in range(2)]
            scales = torch.ones(size, 1, device=self.device)
            return lambda: torch._scaled_mm(x, w.t(), scale_a=scales, scale_b=scales.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

        def memory():
            count = asked["copy_bytes"] // 4
            x, total = torch.ones(count, device=self.device), torch.zeros(count, device=self.device)
            return max(2 / seconds(lambda: x + 1.0), 3 / seconds(lambda: total.add_(x))) * asked["copy_bytes"]

        for name in [*asked["formats"], "memory"]:
            try:
                rate = memory() if name == "memory" else 2 * size**3 / seconds(square(name))
                self.write({"peak": {"name": name, "rate": rate}})
            except Exception as error:  # a format that this PyTorch or device lacks
                self.note(f"no peak of PyTorch in {name}: {type(error).__name__}: {first_line(error, 160)}")

    def gemm(self, case, kind, name, s):
        dtype, what = self.dtype(name), case["key"]["what"]
        n, i, o = s["tokens"], s["in"], s["out"]
        if name == "fp8" and kind == "forward":
            return self.gemm_fp8(case, n, i, o)
        if dtype is None or " in nf4" in what and self.bitsandbytes is None:
            return None
        bytes_ = (n * (i + o) + i * o) * dtype.itemsize
        if " in nf4" in what:
            functional = self.bitsandbytes.functional

            def prepare():
                x, w = self.random(n, i, dtype=dtype), self.random(o, i, dtype=dtype)
                codes, state = functional.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
                return lambda: self.bitsandbytes.matmul_4bit(x, codes.t(), quant_state=state)

            return self.add(case, "bitsandbytes", prepare, (n * (i + o) + i * o / 4) * dtype.itemsize)

        def prepare():
            x, w, dy = self.random(n, i, dtype=dtype), self.random(o, i, dtype=dtype), self.random(n, o, dtype=dtype)
            if kind == "forward":
                return lambda: x @ w.t()
            if kind == "input_gradient":
                return lambda: dy @ w
            return lambda: (dy @ w, (dy.t() @ x).float())

        return self.add(case, "pytorch", prepare, bytes_)

    def gemm_fp8(self, case, n, i, o):
        """Both operands are converted in the call, with a scale per row, as ours are."""
        torch = self.torch

        def codes(x):
            scale = x.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / 448.0
            return (x / scale).to(torch.float8_e4m3fn), scale

        def prepare():
            x, w = self.random(n, i, dtype=torch.bfloat16), self.random(o, i, dtype=torch.bfloat16)

            def call():
                (x8, x_scale), (w8, w_scale) = codes(x), codes(w)
                return torch._scaled_mm(x8, w8.t(), scale_a=x_scale, scale_b=w_scale.t(), out_dtype=torch.bfloat16, use_fast_accum=True)

            return call

        self.add(case, "pytorch", prepare, 2 * (n * (i + o) + i * o))

    def attention(self, case, kind, name, s):
        torch, dtype = self.torch, self.dtype(name)
        b, t, h, g, k = s["documents"], s["length"], s["heads"], s["kv_heads"], s["head_dim"]
        attend = torch.nn.functional.scaled_dot_product_attention

        def prepare():
            backward = kind == "backward"
            q = self.random(b, h, t, k, dtype=dtype).requires_grad_(backward)
            kv = [self.random(b, g, t, k, dtype=dtype).requires_grad_(backward) for _ in range(2)]
            if not backward:
                return lambda: attend(q, *kv, is_causal=True, enable_gqa=True)
            o = attend(q, *kv, is_causal=True, enable_gqa=True)
            d_o = self.random(b, h, t, k, dtype=dtype)
            return lambda: torch.autograd.grad(o, [q, *kv], d_o, retain_graph=True)

        self.add(case, "pytorch", prepare, b * t * k * (2 * h + 2 * g) * dtype.itemsize)

    def by_rows(self, case, kind, name, s, forward, inputs):
        """`forward` of `inputs` tensors [tokens, width], or its gradient by autograd."""
        torch, dtype = self.torch, self.dtype(name)
        n, d = s["tokens"], s["width"]

        def prepare():
            x = [self.random(n, d, dtype=dtype).requires_grad_(kind == "backward") for _ in range(inputs)]
            if kind == "forward":
                return lambda: forward(*x)
            y, dy = forward(*x), self.random(n, d, dtype=dtype)
            return lambda: torch.autograd.grad(y, x, dy, retain_graph=True)

        self.add(case, "pytorch", prepare, (inputs + (kind == "backward")) * n * d * dtype.itemsize)

    def norm(self, case, kind, name, s):
        weight = self.random(s["width"], dtype=self.dtype(name))
        forward = lambda x: self.torch.nn.functional.rms_norm(x, (s["width"],), weight, 1e-5)
        self.by_rows(case, kind, name, s, forward, 1)

    def gated(self, case, kind, name, s):
        self.by_rows(case, kind, name, s, lambda gate, up: self.torch.nn.functional.silu(gate) * up, 2)

    def rotary(self, case, kind, name, s):
        torch, dtype, k = self.torch, self.dtype(name), s["head_dim"]
        angles = self.random(s["tokens"], k // 2)
        cos, sin = [torch.cat([f(angles)] * 2, 1).unsqueeze(1).to(dtype) for f in (torch.cos, torch.sin)]

        def forward(x):
            heads = x.view(x.shape[0], -1, k)
            turned = torch.cat([-heads[..., k // 2 :], heads[..., : k // 2]], -1)
            return (heads * cos + turned * sin).view_as(x)

        self.by_rows(case, kind, name, s, forward, 1)

    def cross_entropy(self, case, kind, name, s):
        torch, n, v = self.torch, s["tokens"], s["vocab"]
        targets = torch.arange(n, device=self.device) * 7919 % v
        loss = lambda logits: torch.nn.functional.cross_entropy(logits, targets, reduction="sum") * 1e-2
        if kind == "with_gradient":

            def prepare():
                logits = self.random(n, v).requires_grad_()
                return lambda: torch.autograd.grad(loss(logits), logits)

            return self.add(case, "pytorch", prepare, 4 * n * v)
        dtype, d = self.dtype(name), s["hidden"]

        def prepare():
            x, w = self.random(n, d, dtype=dtype).requires_grad_(), self.random(v, d, dtype=dtype)
            return lambda: torch.autograd.grad(loss((x @ w.t()).float()), x)

        return self.add(case, "pytorch", prepare, v * d * dtype.itemsize)

    def four_bit(self, case, name, s, dequantize):
        if self.bitsandbytes is None or not name.startswith("nf4"):
            return
        functional, o, i = self.bitsandbytes.functional, s["out"], s["in"]

        def prepare():
            values = self.random(o, i)
            quantize = lambda: functional.quantize_4bit(values, quant_type="nf4", compress_statistics=name != "nf4")
            if not dequantize:
                return quantize
            codes, state = quantize()
            return lambda: functional.dequantize_4bit(codes, state)

        self.add(case, "bitsandbytes", prepare, o * i * (0.5 if dequantize else 4))

    def quantize(self, case, kind, name, s):
        self.four_bit(case, name, s, False)

    def dequantize(self, case, kind, name, s):
        self.four_bit(case, name, s, True)

    def optimizer(self, case, kind, name, s):
        torch, count = self.torch, s["parameters"]
        if kind == "squared_norm":
            def prepare():
                x = self.random(count)
                return lambda: x.square().sum()

            return self.add(case, "pytorch", prepare, 4 * count)
        if kind == "adamw_8bit" and (self.bitsandbytes is None or self.device == "cpu"):
            return None

        def prepare():
            parameter = torch.nn.Parameter(self.random(count))
            parameter.grad = self.random(count)
            if kind == "adamw_8bit":
                return self.bitsandbytes.optim.AdamW8bit([parameter], lr=1e-3).step
            return torch.optim.AdamW([parameter], lr=1e-3, fused=True).step

        return self.add(case, "bitsandbytes" if kind == "adamw_8bit" else "pytorch", prepare, 28 * count)

    def model(self, case, four_bit):
        """A random model of the case's config: in 4 bits through a saved folder, since only loading quantizes."""
        transformers, torch = self.transformers, self.torch
        dtype = self.dtype(case["key"]["format"])
        config = transformers.LlamaConfig(**{k: v for k, v in json.loads(case["config"]).items() if k not in ("architectures", "model_type")})
        # Random numbers of a billion weights take the processor a minute.
        with torch.device(self.device):
            model = transformers.LlamaForCausalLM(config).to(dtype)
        if not four_bit:
            return model
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            settings = transformers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
            )
            return transformers.LlamaForCausalLM.from_pretrained(
                folder, quantization_config=settings, dtype=dtype, device_map=self.device
            )

    def training(self, case, model, eight_bit):
        torch, s = self.torch, case["key"]["sizes"]
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = self.bitsandbytes.optim.AdamW8bit(trained) if eight_bit else torch.optim.AdamW(trained, fused=True)
        vocab = json.loads(case["config"])["vocab_size"]

        def call():
            ids = torch.randint(vocab, (s["rows"], s["length"]), device=self.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(trained, 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            return loss.item()

        return call

    MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]

    def step(self, case, kind, name, s):
        on_gpu = self.device == "cuda"
        if self.unsloth is not None:
            return self.add(case, "unsloth", lambda: self.unsloth_step(case))
        if self.peft is not None and (self.bitsandbytes is not None or not on_gpu):

            def prepare():
                model = self.model(case, four_bit=on_gpu)
                lora = self.peft.LoraConfig(r=16, lora_alpha=32, target_modules=self.MODULES, task_type="CAUSAL_LM")
                model = self.peft.get_peft_model(model, lora)
                return self.training(case, model.train(), on_gpu)

            self.add(case, "transformers + peft" + ("" if on_gpu else " (base in f32)"), prepare)

    def unsloth_step(self, case):
        """Unsloth loads from folders that have a tokenizer; one is made of nothing but bytes."""
        from tokenizers import Tokenizer, models

        fast, s = self.unsloth.FastLanguageModel, case["key"]["sizes"]
        with tempfile.TemporaryDirectory() as folder:
            self.model(case, four_bit=False).save_pretrained(folder)
            words = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}
            tokenizer = self.transformers.PreTrainedTokenizerFast(
                tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")),
                pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
            )
            tokenizer.save_pretrained(folder)
            model, _ = fast.from_pretrained(folder, max_seq_length=s["length"], load_in_4bit=True, dtype=self.torch.bfloat16)
        model = fast.get_peft_model(
            model, r=16, lora_alpha=32, target_modules=self.MODULES, lora_dropout=0, bias="none", use_gradient_checkpointing=False
        )
        return self.training(case, model, True)

    def generation(self, case, kind, name, s):
        if self.transformers is None:
            return

        def prepare():
            model = self.model(case, four_bit=False).eval()
            ids = self.torch.randint(1000, (s["prompts"], 32), device=self.device)
            new = s["new_tokens"]
            return lambda: model.generate(ids, do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0)

        self.add(case, "transformers", prepare)


def run_unsloth(seconds_left, write, answer):
    """Steps in another process, where Unsloth can replace parts of transformers."""
    if importlib.util.find_spec("unsloth") is None:
        return write({"note": "Python has no unsloth."})
    seconds = max(60, int(seconds_left))
    subprocess.run([sys.executable, __file__, sys.argv[1], str(seconds)], stdin=subprocess.DEVNULL, stdout=answer, check=False)


def main():
    """Arguments: the file of cases; with a number of seconds after it, only the steps by Unsloth."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    # What libraries print must not mix with the answer.
    answer, sys.stdout = sys.stdout, sys.stderr
    with open(sys.argv[1], encoding="utf-8") as file:
        request = json.load(file)
    cases, with_unsloth = request["cases"], len(sys.argv) > 2
    if with_unsloth:
        request["seconds"] = int(sys.argv[2])
        cases = [case for case in cases if case["key"]["subject"] == "step"]

    def write(line):
        print(json.dumps(line), file=answer, flush=True)

    peers = Peers(request, write, with_unsloth)
    if peers.torch is not None and not with_unsloth:
        peers.peaks(request["peaks"])
    for done, case in enumerate(cases):
        if time.monotonic() > peers.deadline:
            peers.note(f"{len(cases) - done} cases were left out: the {request['seconds']} s for other programs were spent.")
            break
        if peers.unsloth is not None or not with_unsloth:
            peers.run(case)
    if with_unsloth:
        return
    if peers.device == "cuda":
        run_unsloth(peers.deadline - time.monotonic(), write, answer)
    else:
        peers.note("Unsloth needs a GPU and was left out.")
    write("end")
    # The caller ends this process now: what libraries do on exit may take as long as the cases.


if __name__ == "__main__":
    main()
