package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// transport is what a copy of a suite runs over.
type transport string

const (
	overTCP     transport = "TCP"
	overRDMANet transport = "rdmanet"
)

// tree is a folder with a copy of a suite's module for one transport. It also has a
// workspace that joins the copy with this repository, so that the copy's go.mod is not
// changed. Both copies have such a workspace, because a workspace may raise the versions of
// the suite's dependencies.
type tree struct {
	dir    string
	module string // module is the folder of the copy.
	server string // server is the file of redis-server, if the suite needs it.
}

// prepare makes the tree of a suite for a transport.
func prepare(s suite, over transport, inGuest bool, checkout, temp string) (*tree, error) {
	t := &tree{dir: filepath.Join(temp, s.name, string(over))}
	uses := []string{"./module", checkout, filepath.Join(checkout, "suites")}
	var err error
	t.module, err = t.copyModule("module", s, over)
	if err != nil {
		return nil, err
	}
	if inGuest {
		for _, a := range s.inGuest {
			if err := a.apply(t.module); err != nil {
				return nil, err
			}
		}
	}
	if s.server {
		uses = append(uses, "./server")
		if err := t.addServer(over, checkout); err != nil {
			return nil, err
		}
	}
	goVersion, err := t.goVersion()
	if err != nil {
		return nil, err
	}
	if err := t.workspace(uses, goVersion); err != nil {
		return nil, err
	}
	if s.server {
		t.server = filepath.Join(t.dir, "redis-server")
		return t, t.build(filepath.Join(t.dir, "server"), "build", t.server, "./"+serverDir)
	}
	return t, nil
}

// copyModule copies a suite's module, and rewrites it for rdmanet.
func (t *tree) copyModule(name string, s suite, over transport) (string, error) {
	from, err := download(s)
	if err != nil {
		return "", err
	}
	to := filepath.Join(t.dir, name)
	if err := os.CopyFS(to, os.DirFS(from)); err != nil {
		return "", err
	}
	// The module cache is read-only.
	err = filepath.WalkDir(to, func(path string, d os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			return os.Chmod(path, 0o777)
		}
		return os.Chmod(path, 0o666)
	})
	if err != nil || over == overTCP {
		return to, err
	}
	changed := 0
	for _, dir := range append(s.packages, s.rewrite...) {
		n, err := rewriteDir(filepath.Join(to, dir))
		if err != nil {
			return "", err
		}
		changed += n
	}
	if changed == 0 {
		return "", fmt.Errorf("nothing was to be rewritten in %s", s.module)
	}
	return to, nil
}

// apply replaces the text everywhere in the file.
func (a adaptation) apply(module string) error {
	name := filepath.Join(module, a.file)
	text, err := os.ReadFile(name)
	if err != nil {
		return err
	}
	if !strings.Contains(string(text), a.old) {
		return fmt.Errorf("%s has no %q", a.file, a.old)
	}
	return os.WriteFile(name, []byte(strings.ReplaceAll(string(text), a.old, a.new)), 0o666)
}

// download makes the go command fetch a module, and returns its folder in the cache. It
// compares the checksum with the table's. The go command makes its own checks too.
func download(s suite) (string, error) {
	cmd := exec.Command("go", "mod", "download", "-json", s.module+"@"+s.version)
	cmd.Dir = os.TempDir() // The folder is in no module, because a go.mod would have an effect.
	cmd.Env = append(os.Environ(), "GOWORK=off", "GOFLAGS=-mod=mod")
	out, err := cmd.Output()
	var m struct{ Dir, Sum, Error string }
	if jsonErr := json.Unmarshal(out, &m); jsonErr != nil {
		return "", fmt.Errorf("go mod download: %w", err)
	}
	switch {
	case m.Error != "":
		return "", fmt.Errorf("go mod download: %s", m.Error)
	case err != nil:
		return "", fmt.Errorf("go mod download: %w", err)
	case m.Sum != s.sum:
		return "", fmt.Errorf("%s %s has the checksum %s, and the table has %s", s.module, s.version, m.Sum, s.sum)
	}
	return m.Dir, nil
}

// serverDir is the folder of redis-server in a copy of miniredis.
const serverDir = "rdmanet-redis-server"

// addServer puts a copy of miniredis beside the module, with a program that runs it as
// redis-server.
func (t *tree) addServer(over transport, checkout string) error {
	chosen, err := choose(false, []string{"miniredis"})
	if err != nil {
		return err
	}
	module, err := t.copyModule("server", chosen[0], over)
	if err != nil {
		return err
	}
	return os.CopyFS(filepath.Join(module, serverDir), os.DirFS(filepath.Join(checkout, "suites", "testdata", "redis-server")))
}

// goVersion returns the version of Go that the module's go.mod names.
func (t *tree) goVersion() (string, error) {
	cmd := exec.Command("go", "mod", "edit", "-json")
	cmd.Dir = t.module
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("go mod edit: %w", err)
	}
	var mod struct{ Go string }
	err = json.Unmarshal(out, &mod)
	return mod.Go, err
}

// workspace writes go.work. It has a godebug setting, so that the tests run with the
// behaviour of Go that they have in the module alone.
func (t *tree) workspace(uses []string, goVersion string) error {
	var b strings.Builder
	fmt.Fprintf(&b, "go 1.26.0\ngodebug default=go%s\n", goVersion)
	for _, dir := range uses {
		fmt.Fprintf(&b, "use %q\n", dir)
	}
	return os.WriteFile(filepath.Join(t.dir, "go.work"), []byte(b.String()), 0o666)
}

// testBinary builds the tests of a package.
func (t *tree) testBinary(pkg string) (string, error) {
	bin := filepath.Join(t.dir, strings.NewReplacer("/", "-", ".", "module").Replace(pkg)+".test")
	return bin, t.build(t.module, "test", bin, "-c", "./"+pkg)
}

// build runs go build or go test. It trims paths, because otherwise a build in a new
// temporary folder could not use the build cache.
func (t *tree) build(dir, command, bin string, args ...string) error {
	cmd := exec.Command("go", append([]string{command, "-trimpath", "-o", bin}, args...)...)
	cmd.Dir = dir
	cmd.Env = append(os.Environ(), "GOWORK="+filepath.Join(t.dir, "go.work"), "GOFLAGS=")
	cmd.Stdout, cmd.Stderr = os.Stderr, os.Stderr
	if err := cmd.Run(); err != nil {
		return fmt.Errorf("go %s %s: %w", command, strings.Join(args, " "), err)
	}
	return nil
}
