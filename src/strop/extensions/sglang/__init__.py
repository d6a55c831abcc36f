"""SGLang: its server in separate processes, with requests over HTTP."""
