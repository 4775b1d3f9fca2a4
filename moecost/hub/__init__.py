"""`config.json` of a Hugging Face model -> a model in plain numbers: `reading.read`.

`families` holds what is an ordinary decoder as a line of traits each; `irregular`, `hybrids` and `recent` what needs a
reader of its own, made of the same parts. They are imported when a config is read, not with moecost.
"""
