"""Settings of Sphinx for the documents as a site; docs/site/build.py is the command."""

project = "nemo_rl_cpp"
author = "the authors of nemo_rl_cpp"
extensions = ["myst_parser"]
root_doc = "index"
myst_heading_anchors = 4  # as on a forge: every heading up to this depth can be linked to
html_theme = "furo"
html_title = "nemo_rl_cpp"
html_copy_source = False
html_show_sourcelink = False
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {"navigation_with_keys": True}
pygments_style = "friendly"
pygments_dark_style = "monokai"
python_maximum_signature_line_length = 88
add_module_names = False
toc_object_entries_show_parents = "hide"
