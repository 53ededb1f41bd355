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
    # What JAX does by default.
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
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
    """Seconds of a step, as `program.measured`; AdamW fused where there is a GPU."""
    import torch  # pyright: ignore[reportMissingImports] (of the group parity)

    model, device = load(setting, config, is_small=is_small)
    if setting.remat == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    model.config.use_cache = False
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
    run = torch.compile(model) if setting.library == "torch.compile" else model
    tokens = torch.randint(0, 256, (setting.batch, setting.length), device=device)

    def wide() -> Any:
        is_mixed = setting.precision == "mixed"
        return (
            torch.autocast(device, torch.bfloat16)
            if is_mixed
            else contextlib.nullcontext()
        )

    def step() -> Any:
        with wide():
            loss = run(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    begun = time.perf_counter()
    losses, times = [float(step())], []
    compile_seconds = time.perf_counter() - begun
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        loss: Any = None
        for _ in range(num_steps):
            loss = step()
        losses.append(float(loss))  # is waited for
        times.append((time.perf_counter() - begun) / num_steps)
    seconds = times[1:]
    has_peak = device == "cuda"
    return {
        "seconds": statistics.median(seconds),
        "spread": max(seconds) / min(seconds) - 1,
        "compile_seconds": compile_seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if has_peak else None,
        "losses": [losses[0], losses[-1]],
        "num_parameters": sum(x.numel() for x in model.parameters()),
    }
