package rdmanet

import (
	"flag"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/rdmanet/rdmanet/ibv/verbstest"
)

// setUps is how many set-ups TestListenerCloseRaces has the end of the listener meet.
var setUps = flag.Int("setups", 600, "set-ups that TestListenerCloseRaces has")

// The end of a listener meets dials in every state that they can be in: not yet
// connected, in the handshake, waiting for Accept, accepted and in use.
func TestListenerCloseRaces(t *testing.T) {
	checkLeaks(t)
	sw := newSwitch(t, nil)
	cfg := Config{Provider: sw, LingerTimeout: 50 * time.Millisecond}
	const dials = 6
	for n := range heavy(*setUps) / dials {
		ln, err := (&ListenConfig{Config: cfg, Backlog: 1 + n%dials}).Listen(tctx, "rdma4", local4)
		require.NoError(t, err)
		var all sync.WaitGroup
		began := make(chan struct{}, 2*dials)
		for range dials {
			all.Go(func() {
				began <- struct{}{}
				c, err := (&Dialer{Config: cfg}).Dial("rdma4", ln.Addr().String())
				if err != nil {
					return
				}
				began <- struct{}{}
				_, _ = c.Write([]byte("hello"))
				_ = c.Close()
			})
		}
		all.Go(func() {
			for {
				c, err := ln.Accept()
				if err != nil {
					assert.ErrorIs(t, err, net.ErrClosed)
					return
				}
				all.Go(func() {
					_, _ = c.Read(make([]byte, 5))
					_ = c.Close()
				})
			}
		})
		within(t, "dials and Close", func() {
			for range n % (2 * dials) { // as far as they have come then
				select {
				case <-began:
				case <-time.After(time.Millisecond):
				}
			}
			assert.NoError(t, ln.Close())
			all.Wait()
		})
	}
}

// However often a step of set-up fails at either end, nothing stays behind, and the
// listener accepts the next one.
func TestSetUpFailsOftenThenAccepts(t *testing.T) {
	checkLeaks(t)
	for _, k := range []verbstest.Kind{verbstest.Resolve, verbstest.AllocPD, verbstest.CreateCQ, verbstest.RegMR,
		verbstest.CreateQP, verbstest.PostRecv, verbstest.Connect, verbstest.Accept, verbstest.ListenerAccept} {
		t.Run(k.String(), func(t *testing.T) {
			sw := newSwitch(t, nil)
			cfg := Config{Provider: sw, LingerTimeout: 50 * time.Millisecond}
			ln, err := (&ListenConfig{Config: cfg, Backlog: 4}).Listen(tctx, "rdma4", local4)
			require.NoError(t, err)
			greeted := make(chan struct{}, 1)
			var all sync.WaitGroup
			all.Go(func() {
				for {
					c, err := ln.Accept()
					if err != nil {
						return
					}
					all.Go(func() { // at once, as the backlog is short
						defer c.Close()
						b := make([]byte, 5)
						if n, _ := io.ReadFull(c, b); string(b[:n]) == "hello" {
							greeted <- struct{}{}
						}
					})
				}
			})
			d := Dialer{Config: cfg, Timeout: patience}
			struck := 0
			for n := range heavy(24) {
				fault := sw.FailNth(1+n%3, nil, k) // the active side's, or the passive side's
				c, err := d.Dial("rdma4", ln.Addr().String())
				if fault.Fired() {
					struck++
				} else {
					fault.Cancel()
				}
				if err == nil {
					_ = c.Close()
				}
			}
			require.NotZero(t, struck, "no fault has struck")
			within(t, "the next one", func() {
				var c net.Conn
				require.True(t, eventually(func() bool { // the backlog may still be full
					c, err = d.Dial("rdma4", ln.Addr().String())
					return err == nil
				}), "%v", err)
				_, err = c.Write([]byte("hello"))
				require.NoError(t, err)
				<-greeted
				require.NoError(t, c.Close())
			})
			require.NoError(t, ln.Close())
			all.Wait()
		})
	}
}

// Every test that docs/security.md names exists, and each class has one.
func TestSecurityTable(t *testing.T) {
	doc, err := os.ReadFile("docs/security.md")
	require.NoError(t, err)
	_, table, found := strings.Cut(string(doc), "## Classes of faults\n")
	require.True(t, found)
	table, _, _ = strings.Cut(table, "\n## ")
	exist := testNames(t)
	name := regexp.MustCompile("`((?:Test|Fuzz)[^`]*)`")
	rows := 0
	for line := range strings.Lines(table) {
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "| class") || strings.HasPrefix(line, "|---") {
			continue
		}
		rows++
		names := name.FindAllStringSubmatch(line, -1)
		assert.NotEmpty(t, names, "no test: %s", line)
		for _, m := range names {
			assert.True(t, slices.Contains(exist, m[1]), "there is no %s", m[1])
		}
	}
	assert.Greater(t, rows, 20)
}

// testNames returns the tests of the module, and the parts of the devices' suite in the
// form TestProvider/Name.
func testNames(t *testing.T) (names []string) {
	part := regexp.MustCompile(`(?m)^\t\{"(\w+)", `)
	suite, err := os.ReadFile("ibv/verbstest/suite.go")
	require.NoError(t, err)
	for _, m := range part.FindAllStringSubmatch(string(suite), -1) {
		names = append(names, "TestProvider/"+m[1])
	}
	require.NotEmpty(t, names)
	require.NoError(t, filepath.WalkDir(".", func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		for _, d := range file.Decls {
			if f, ok := d.(*ast.FuncDecl); ok && f.Recv == nil {
				names = append(names, f.Name.Name)
			}
		}
		return nil
	}))
	return names
}
