from pathlib import Path

from agent_sat.doctor import examine, folder, package


def test_missing_package_says_how_to_get_it():
    finding = package("no-such-package-at-all", "")
    assert (finding.works, finding.found) == (False, "not installed")
    assert "pip install" in finding.advice


def test_installed_package_tells_its_version():
    assert package("ray", "").works


def test_full_disk_is_found(tmp_path: Path):
    finding = folder(tmp_path, 1e9, "choose another")
    assert (finding.works, finding.advice) == (False, "choose another")


def test_folder_that_is_not_there_is_found(tmp_path: Path):
    assert folder(tmp_path / "nowhere", 1.0, "make it").found == "not there"


def test_examination_tries_every_sandbox_and_advises_on_what_fails():
    findings = {finding.name: finding for finding in examine(docker=False)}
    assert {
        "sandbox jail",
        "sandbox confined",
        "sandbox process",
        "torch",
        "GPUs",
        "/dev/shm",
    } <= findings.keys()
    assert any(findings[f"sandbox {tier}"].works for tier in ("jail", "confined", "process"))
    assert all(finding.works or finding.advice for finding in findings.values())
