"""torchvision imports beside whichever build of torch there is, and what needs it works."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

PROGRAM = """
import cpu_torchvision, torchvision, timm, torch
from PIL import Image
from torchvision import transforms
from torchvision.transforms import v2

image = Image.new("RGB", (40, 30), "red")
augment = transforms.Compose([transforms.RandomResizedCrop(32), transforms.ToTensor()])
assert augment(image).shape == (3, 32, 32)
assert v2.functional.to_image(image).shape == (3, 30, 40)

model = timm.create_model("test_vit", pretrained=False, num_classes=5).eval()
assert model(torch.zeros(1, 3, 160, 160)).shape == (1, 5)
print("works")
"""


def test_torchvision_and_timm_work_after_it():
    # A fresh interpreter: in this one, conftest.py has imported it long ago.
    run = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "works\n"
