"""What runs in the processes of an SGLang server, under the interpreter that has SGLang."""
