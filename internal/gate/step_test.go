package main

import (
	"bytes"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"testing"

	"github.com/stretchr/testify/require"
)

// inFolder makes a folder with a Makefile the current one.
func inFolder(t *testing.T, makefile string) {
	t.Helper()
	if runtime.GOOS == "windows" {
		t.Skip("make check wants a POSIX shell")
	}
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("Makefile", []byte(makefile), 0o666))
}

func runStep(t *testing.T, name, state, dir string) *step {
	t.Helper()
	s := &step{name: name, dir: filepath.Join(dir, name)}
	if state != "" {
		s.tree = func() (string, error) { return state, nil }
	}
	require.NoError(t, s.run(io.Discard))
	return s
}

// A step whose command fails has failed, whatever its tests say, and a step whose tests have
// failed has failed, although its command does not.
func TestStep(t *testing.T) {
	fixtures, err := filepath.Abs("testdata")
	require.NoError(t, err)
	inFolder(t, `
good:
	@cp `+fixtures+`/good.json "$$RDMANET_GATE"
broken: good
	@echo the disk is full; exit 3
leak:
	@cp `+fixtures+`/leak.json "$$RDMANET_GATE"
once:
	@cp `+fixtures+`/once.json "$$RDMANET_GATE"; echo ERROR rerun aborted; exit 1
nothing:
	@touch "$$RDMANET_GATE/a.json"
garbage:
	@echo vm: >"$$RDMANET_GATE/a.json"
plain:
	@true
`)
	dir := t.TempDir()
	s := runStep(t, "good", "", dir)
	require.Equal(t, passed, s.result.Status)
	require.Equal(t, 3, s.result.Tests)
	s = runStep(t, "broken", "", dir)
	require.Equal(t, failed, s.result.Status)
	require.Contains(t, s.result.Failure, "the disk is full")
	s = runStep(t, "leak", "", dir)
	require.Equal(t, failed, s.result.Status)
	require.Contains(t, s.result.Failure, "1 goroutine left")
	s = runStep(t, "once", "", dir)
	require.Equal(t, failed, s.result.Status)
	require.Regexp(t, `(?s)^TestAlways .* in its only run.*it is wrong.*\nERROR rerun aborted$`, s.result.Failure)
	s = runStep(t, "nothing", "", dir)
	require.Equal(t, failed, s.result.Status)
	require.Contains(t, s.result.Failure, "no test was run")
	s = runStep(t, "garbage", "", dir)
	require.Equal(t, failed, s.result.Status)
	require.Contains(t, s.result.Failure, "no event of a test")
	s = runStep(t, "plain", "", dir)
	require.Equal(t, passed, s.result.Status)
	require.NoFileExists(t, s.file("result"))
}

// A step that has passed is not run again for the same files.
func TestStepKept(t *testing.T) {
	inFolder(t, "step:\n\t@echo run >>runs; test ! -e broken\n")
	dir := t.TempDir()
	runs := func() int {
		b, err := os.ReadFile("runs")
		require.NoError(t, err)
		return len(b) / len("run\n")
	}
	require.NoError(t, os.WriteFile("broken", nil, 0o666))
	require.Equal(t, failed, runStep(t, "step", "files", dir).result.Status)
	require.NoError(t, os.Remove("broken"))
	require.Equal(t, passed, runStep(t, "step", "files", dir).result.Status)
	require.Equal(t, 2, runs())
	require.Equal(t, passed, runStep(t, "step", "files", dir).result.Status)
	require.Equal(t, 2, runs())
	require.Equal(t, passed, runStep(t, "step", "other files", dir).result.Status)
	require.Equal(t, 3, runs())
}

// Files that change while a step runs are not those that it has tested.
func TestStepOfChangingFiles(t *testing.T) {
	inFolder(t, "step:\n\t@true\n")
	s := &step{name: "step", dir: t.TempDir()}
	n := 0
	s.tree = func() (string, error) { n++; return strconv.Itoa(n), nil }
	require.NoError(t, s.run(io.Discard))
	require.Equal(t, passed, s.result.Status)
	require.NoFileExists(t, s.file("result"))
}

func TestTreeState(t *testing.T) {
	t.Chdir(t.TempDir())
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-c", "user.name=a", "-c", "user.email=a@example.org"}, args...)...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
	}
	write := func(name, text string) { require.NoError(t, os.WriteFile(name, []byte(text), 0o666)) }
	seen := make(map[string]string)
	differs := func(what string) {
		t.Helper()
		state, err := treeState()
		require.NoError(t, err)
		require.NotContains(t, seen, state, what)
		seen[state] = what
	}
	_, err := treeState()
	require.Error(t, err)
	git("init", "-q")
	write("file", "1")
	write(".gitignore", "/ignored\n")
	git("add", ".")
	git("commit", "-qm", "first")
	differs("a commit")
	write("file", "2")
	differs("a change")
	write("new \"file", "1")
	differs("a new file")
	write("new \"file", "2")
	differs("a change of it")
	t.Setenv("RDMANET_SKIP_VM", "1")
	differs("a variable of rdmanet")
	t.Setenv("N", "10")
	differs("a variable of make")
	before, err := treeState()
	require.NoError(t, err)
	write("ignored", "1")
	t.Setenv("OTHER", "1")
	after, err := treeState()
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// Steps that run side by side meet, and each has its own output and result.
func TestSideBySide(t *testing.T) {
	inFolder(t, `
one:
	@echo one >first; while test ! -e second; do sleep 0.01; done; echo one sees two
two:
	@echo two >second; while test ! -e first; do sleep 0.01; done; echo two sees one; exit 1
`)
	dir := t.TempDir()
	one, two := &step{name: "one", dir: filepath.Join(dir, "one")}, &step{name: "two", dir: filepath.Join(dir, "two")}
	var output bytes.Buffer
	require.NoError(t, sideBySide([]*step{one, two}, &output))
	require.Equal(t, passed, one.result.Status)
	require.Equal(t, failed, two.result.Status)
	require.Contains(t, two.result.Failure, "two sees one")
	require.NotContains(t, two.result.Failure, "one sees two")
	require.Regexp(t, `(?s)^== make one\none sees two\n== make one: ok.*== make two\ntwo sees one\n.*== make two: FAILED`, output.String())
}
