"""The main job: a byte-level GPT trained on real text with too little memory for its weights."""
