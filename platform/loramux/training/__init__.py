"""Fine-tuning jobs: checked training files, jobs with OpenAI's states, and the trainers that run them."""
