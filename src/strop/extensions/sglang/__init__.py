"""SGLang: its server in processes of its own, with requests over HTTP."""
