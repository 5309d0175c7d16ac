"""How the package gets into an ms-swift command: autoload hook, doors, worker process, patches with passports (import tier 0)."""
