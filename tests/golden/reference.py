"""A checkpoint in PyTorch, and the pipeline of transformers around it, for the scripts that create golden answers."""

from pathlib import Path
from typing import Any

import torch
import transformers

torch.set_num_threads(1)


class Model:
    """A checkpoint in float32 with eager attention, and its pipeline."""

    def __init__(self, checkpoint: Path, auto_class: Any, task: str | None = None) -> None:
        """Loads model and tokenizer, and the pipeline of a task, if one is given."""
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
        self.model = auto_class.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager").eval()
        self.labels: list[str] = [self.model.config.id2label[i] for i in range(self.model.config.num_labels)]
        if task is not None:
            self.pipeline: Any = transformers.pipeline(task, model=self.model, tokenizer=self.tokenizer, device="cpu")

    @torch.inference_mode()
    def token_logits(self, ids: list[int]) -> Any:
        """Returns the logits of text tokens, float32 [tokens, values], which run as one row between [CLS] and [SEP]."""
        row = [self.tokenizer.cls_token_id, *ids, self.tokenizer.sep_token_id]
        return self.model(input_ids=torch.tensor([row])).logits[0, 1:-1].numpy()
