"""The site of the documentation: ``make docs``."""

import re
import sys
from importlib.metadata import version as version_of
from inspect import Signature
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from sphinx.application import Sphinx
from sphinx.util.inspect import signature, stringify_signature

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "integrations"), str(HERE.parent)]

import generate  # noqa: E402

project = "kvboost_rag"
author = "The kvboost_rag developers"
release = version = version_of("kvboost-rag")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
# Links to headings, as code hosts make them.
myst_heading_anchors = 3

napoleon_google_docstring = False
# The type stands in the signature.
napoleon_use_rtype = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Long unions that have a name.
autodoc_type_aliases = {name: name for name in ("LanguageModelInput", "RESPONSE_TEXT_TYPE")}
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

nitpicky = True
# Types of other packages: their sites are not asked for, so that the build needs no network.
nitpick_ignore_regex = [
    (
        "py:.*",
        r"(torch|transformers|numpy|np|npt|langchain_core|llama_index\.core|llama_index_instrumentation|pydantic"
        r"|collections|typing|pathlib|uuid|json|Path|LanguageModelInput|RESPONSE_TEXT_TYPE)\b.*",
    ),
    # Named for readers of the source; no part of the reference.
    (
        "py:.*",
        r"kvboost_rag\.(tokens|sensitivity|progress|bench\.(data|measure|summary)|types\.(Chunk$|Quantized$)).*",
    ),
    # Types with brackets in docstrings, which are cut at commas.
    ("py:class", r".*\[.*"),
]

html_theme = "furo"
html_title = f"kvboost_rag {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_copyright = False
html_show_sphinx = False

_FORWARD = re.compile(r"TypeAliasForwardRef\('(\w+)'\)")

generate.write_pages(HERE)


def shortened(
    app: Sphinx, what: str, name: str, of: Any, options: Any, parameters: str | None, returns: str | None
) -> tuple[str | None, str | None]:
    """Leave the frameworks' dozens of fields out of pydantic models, and Sphinx's own words out of names of types."""
    if what == "class" and issubclass(of, BaseModel):
        return own_parameters(of), None
    return _FORWARD.sub(r"\1", parameters or "") or None, _FORWARD.sub(r"\1", returns or "") or None


def own_parameters(model: type[BaseModel]) -> str:
    if model.__init__.__module__.startswith(("langchain_kvboost", "llama_index.llms.kvboost")):
        constructor = signature(model.__init__, bound_method=True).replace(return_annotation=Signature.empty)
        return stringify_signature(constructor, unqualified_typehints=True)
    own = [field for field in vars(model).get("__annotations__", ()) if field in model.model_fields]
    return f"(*, {', '.join([*own, '**fields'])})" if own else "(**fields)"


def setup(app: Sphinx) -> None:
    app.connect("autodoc-process-signature", shortened)
