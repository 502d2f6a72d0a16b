"""Feature extraction: the vectors of a text. They are compared by cosine; there are no decisions and no correct answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from bertserve.export.tasks.spec import Document, ExportTask, TokenizerCall
from bertserve.service.bundle.graph_spec import OutputSpec
from bertserve.service.tasks import embed

LAST_LAYER = OutputSpec(name="last_hidden_state", kind="per_token")


def _data_parameters(line_parameters: Sequence[Document], golds: Sequence[Any]) -> list[Document]:
    # vectors are compared as numbers, even if a line requests another encoding
    return [parameters | {"encoding_format": "float"} for parameters in line_parameters]


TASK = ExportTask(
    served=embed.SPEC,
    head="Model",
    outputs=(LAST_LAYER,),
    activation="none",
    text_request=lambda text, spec: embed.EmbedRequest(text),
    ordinary_requests=lambda texts, spec: [],
    tokenizer_call=lambda request, spec: TokenizerCall((request.prompt + request.text,)),
    example=lambda spec: {"inputs": "The bridge was built in Porto in 1886.", "parameters": {"dimensions": 2, "normalize": True}},
    measure=lambda config: "cosine",
    data_parameters=_data_parameters,
)
