"""The same training step by transformers and torch."""

import contextlib
import importlib.util
import statistics
import time
from typing import Any

from .settings import Setting


def load(setting: Setting, config: Any, *, is_small: bool) -> tuple[Any, str]:
    """The model on the device, and the device.

    **Raises:**

    `ImportError` where torch, its CUDA or flash-attn is missing: the row then says so.
    """
    import torch  # pyright: ignore[reportMissingImports] (of the group parity)
    import transformers

    if not (is_small or torch.cuda.is_available()):
        raise ImportError(f"torch {torch.__version__} has no CUDA here")
    if (
        setting.attention == "flash_attention_2"
        and importlib.util.find_spec("flash_attn") is None
    ):
        raise ImportError("flash-attn is not installed")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # JAX multiplies in TF32 by default, and torch only if it may.
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    entries = config.to_json()
    given = transformers.AutoConfig.for_model(entries.pop("model_type"), **entries)
    dtype = torch.bfloat16 if setting.precision == "bfloat16" else torch.float32
    attention = "sdpa" if setting.attention == "auto" else setting.attention
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            given, dtype=dtype, attn_implementation=attention
        )
    return model, device


def measured(
    setting: Setting, config: Any, *, rounds: int, num_steps: int, is_small: bool
) -> dict[str, Any]:
    """Seconds of a step, as in `program.measured`; AdamW is fused on a GPU."""
    import torch  # pyright: ignore[reportMissingImports] (of the group parity)

    model, device = load(setting, config, is_small=is_small)
    if setting.remat == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    run = model
    if setting.library == "torch.compile":
        run = torch.compile(model)
    tokens = torch.randint(0, 256, (setting.batch, setting.length), device=device)

    def precision() -> Any:
        if setting.precision == "mixed":
            return torch.autocast(device, torch.bfloat16)
        return contextlib.nullcontext()

    def step() -> Any:
        with precision():
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    begun = time.perf_counter()
    losses = [float(step())]
    compile_seconds = time.perf_counter() - begun
    times = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        loss: Any = None
        for _ in range(num_steps):
            loss = step()
        # `float` waits for the device.
        losses.append(float(loss))
        times.append((time.perf_counter() - begun) / num_steps)
    # The first round warms up.
    seconds = times[1:]
    peak = None
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
    return {
        "seconds": statistics.median(seconds),
        "spread": max(seconds) / min(seconds) - 1,
        "compile_seconds": compile_seconds,
        "peak_gib": peak,
        "losses": [losses[0], losses[-1]],
        "num_parameters": sum(x.numel() for x in model.parameters()),
    }
