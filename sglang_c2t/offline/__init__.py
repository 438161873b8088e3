"""Commands that need no SGLang: record, train, evaluate, advise, top."""
