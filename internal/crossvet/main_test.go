package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// What is wrong on one system is found there, by types and by what go vet runs.
func TestCheck(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{
		"go.mod":            "module example.org/m\n\ngo 1.26\n",
		"a.go":              "package m\n\nvar A int\n",
		"type_windows.go":   "package m\n\nvar B string = A\n",
		"printf_freebsd.go": "package m\n\nimport \"fmt\"\n\nfunc F() { fmt.Printf(\"%d\", \"x\") }\n",
		"a_darwin_test.go":  "package m\n\nimport \"testing\"\n\nfunc TestA(t *testing.T) { B() }\n",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		system string
		tests  bool
		wrong  bool
	}{
		{system: "linux/amd64"},
		{system: "linux/arm64", tests: true},
		{system: "windows/amd64", wrong: true},
		{system: "freebsd/amd64", wrong: true},
		{system: "darwin/arm64"},
		{system: "darwin/arm64", tests: true, wrong: true},
	} {
		problems, err := check(dir, tt.system, tt.tests, []string{"./..."})
		if err != nil || (problems > 0) != tt.wrong {
			t.Errorf("%s, with tests %v: %d problems, %v", tt.system, tt.tests, problems, err)
		}
	}
	if _, err := check(dir, "linux", false, []string{"./..."}); err == nil || !strings.Contains(err.Error(), "GOOS/GOARCH") {
		t.Errorf("%v", err)
	}
	if problems, err := check(dir, "linux/amd64", false, []string{"./none/..."}); err == nil && problems == 0 {
		t.Error("no packages pass")
	}
}
