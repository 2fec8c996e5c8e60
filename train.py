"""`python train.py …` is `vitzoo train …`; `accelerate launch train.py …` runs it on several processes."""

from vitzoo.train import main

if __name__ == '__main__':
    main()
