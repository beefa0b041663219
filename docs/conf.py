"""Settings of the documentation site, which `make docs` builds."""

project = "tensorcas-mlflow"
extensions = ["myst_parser", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = "tensorcas-mlflow"
html_extra_path = ["llms.txt"]
myst_heading_anchors = 4
myst_fence_as_directive = ["mermaid"]
# `hex` marks bytes that a test parses, which Pygments does not know.
suppress_warnings = ["misc.highlighting_failure"]
