package main

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/rdmanet/rdmanet"
	"github.com/rdmanet/rdmanet/examples/internal/demo/demotest"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) { demotest.Main(m, main) }

func dial(ctx context.Context, addr string) (net.Conn, error) {
	return rdmanet.DialContext(ctx, "rdma", addr)
}

func TestFetchSeveral(t *testing.T) {
	dir := t.TempDir()
	for name, size := range map[string]int64{"empty": 0, "one": 1, "more": 1<<20 + 7} {
		require.NoError(t, writeRandom(filepath.Join(dir, name), size))
	}
	addr := demotest.Serve(t, func(ln net.Listener) error { return serve(ln, dir) })

	found, err := fetchAll(t.Context(), dial, addr, []string{"empty", "one", "more"})
	demotest.NoError(t, err)
	assert.Equal(t, "3 fetched, SHA-256 as the server states", found)

	_, err = fetchAll(t.Context(), dial, addr, []string{"one", "none"})
	assert.EqualError(t, err, "none: the server says 404 Not Found")
}

func TestFetchDamaged(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("/files/f", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "abd") })
	mux.HandleFunc("/sha256/f", func(w http.ResponseWriter, _ *http.Request) {
		fmt.Fprintf(w, "%x", sha256.Sum256([]byte("abc")))
	})
	addr := demotest.Serve(t, func(ln net.Listener) error { return http.Serve(ln, mux) })

	_, err := fetchAll(t.Context(), dial, addr, []string{"f"})
	assert.ErrorContains(t, err, "f: SHA-256 is a52d159f") // of "abd"
}

func TestPin(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, writeRandom(filepath.Join(dir, "f"), 1000))
	cert, err := selfSigned()
	require.NoError(t, err)
	addr := demotest.Serve(t, func(ln net.Listener) error { return serveTLS(ln, dir, cert) })
	pin := fingerprint(cert.Certificate[0])

	_, err = fetchAll(t.Context(), dial, addr+"#"+pin, []string{"f"})
	assert.NoError(t, err)
	_, err = fetchAll(t.Context(), dial, addr+"#"+strings.Repeat("0", len(pin)), []string{"f"})
	assert.ErrorContains(t, err, "the server's certificate is "+pin)
}

func TestTwoProcesses(t *testing.T) {
	for name, c := range map[string]struct {
		args []string
		want string
	}{
		"HTTP/1.1":     {nil, "over HTTP/1.1"},
		"HTTP/2":       {[]string{"-h2"}, "over HTTP/2.0"},
		"HTTP/1.1 tcp": {[]string{"-network=tcp"}, "over HTTP/1.1"},
	} {
		t.Run(name, func(t *testing.T) {
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			t.Setenv("TMP", tmp) // Windows
			out, err := demotest.Run(t, append(c.args, "-size=3000000")...)
			require.NoError(t, err, out)
			assert.Contains(t, out, c.want)
			assert.Contains(t, out, "random.bin: SHA-256 "+sumOfMade(t, 3000000))
			assert.Contains(t, out, "ok: 1 fetched, SHA-256 as the server states\n")

			left, err := os.ReadDir(tmp)
			require.NoError(t, err)
			assert.Empty(t, left, "the server removes its file")
		})
	}
}

func TestMainFails(t *testing.T) {
	for name, args := range map[string][]string{
		"no such directory":   {"-dir=" + filepath.Join(t.TempDir(), "none")},
		"a flag behind names": {"-dial=127.0.0.1:1", "README.md", "-h2"},
		"names for a server":  {"-serve=127.0.0.1:0", "-until-eof", "README.md"},
		"less than nothing":   {"-size=-1"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := demotest.Run(t, args...)
			assert.Error(t, err)
			assert.NotContains(t, out, "listening")
			assert.NotContains(t, out, "refused")
		})
	}
}

// sumOfMade is the SHA-256 of the made file with size bytes.
func sumOfMade(t *testing.T, size int64) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "f")
	require.NoError(t, writeRandom(path, size))
	data, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Len(t, data, int(size))
	return fmt.Sprintf("%x", sha256.Sum256(data))
}
