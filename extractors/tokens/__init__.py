"""Token vectors of captions from pretrained text models, such as BERT."""
