package main

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

var testFunc = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)\w*)\(`)

// testsIn returns the names of the tests and fuzz targets in a folder, and below it if below
// is set.
func testsIn(t *testing.T, dir string, below bool) map[string]bool {
	t.Helper()
	names := make(map[string]bool)
	require.NoError(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && !below && path != dir:
			return filepath.SkipDir
		case !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		b, err := os.ReadFile(path)
		for _, m := range testFunc.FindAllSubmatch(b, -1) {
			names[string(m[1])] = true
		}
		return err
	}))
	return names
}

func linesOf(t *testing.T, name string) (lines []string) {
	t.Helper()
	b, err := os.ReadFile(name)
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		if line = strings.TrimSpace(line); line != "" && line[0] != '#' {
			lines = append(lines, line)
		}
	}
	return lines
}

// A test that is renamed must not vanish from what guests run.
func TestDeviceTestsExist(t *testing.T) {
	names := testsIn(t, "../..", false)
	lines := linesOf(t, "../../vm/device-tests")
	require.NotEmpty(t, lines)
	for _, line := range lines {
		name, reason, _ := strings.Cut(line, " ")
		require.True(t, names[name], "the root package has no test %s", name)
		require.Regexp(t, `^ *# \w`, reason, "what a device can make different in %s", name)
	}
}

// Each pattern of left-out has its reason, and still matches a test.
func TestLeftOutExists(t *testing.T) {
	names := testsIn(t, "../..", true)
	for _, line := range linesOf(t, "left-out") {
		pattern, reason, _ := strings.Cut(line, "  # ")
		require.NotEmpty(t, reason, pattern)
		root, _, _ := strings.Cut(pattern, "/")
		re, err := regexp.Compile(root)
		require.NoError(t, err)
		found := false
		for name := range names {
			found = found || re.MatchString(name)
		}
		require.True(t, found, "no test matches %s", pattern)
	}
}
