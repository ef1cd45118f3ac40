package rdmanet

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A program that uses net/http closes connections to silent peers as it does over TCP.
// net/http calls Close with locks held, so a Close that waits would hold up other requests.
// Each test runs over TCP and over the software device. The linger time is endless, so a
// call that waits for a silent peer hangs.

// silentPeers is the number of peers that fall silent.
const silentPeers = 4

// plainNet is TCP or the software device, whose connections can go over a frozenLink.
type plainNet struct {
	name   string
	listen func() (net.Listener, error)
	dial   func(ctx context.Context, network, address string) (net.Conn, error)
}

// plainNets returns both. linger is Config.LingerTimeout of the software device.
func plainNets(linger time.Duration) []plainNet {
	cfg := Config{LingerTimeout: linger, Provider: overTCP()}
	return []plainNet{
		{"tcp", func() (net.Listener, error) { return net.Listen("tcp4", "127.0.0.1:0") }, new(net.Dialer).DialContext},
		{"rdma", func() (net.Listener, error) { return (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", "127.0.0.1:0") }, (&Dialer{Config: cfg}).DialContext},
	}
}

func eachPlainNet(t *testing.T, f func(t *testing.T, n plainNet)) {
	for _, n := range plainNets(endless) {
		t.Run(n.name, func(t *testing.T) {
			checkLeaks(t)
			f(t, n)
		})
	}
}

// silentServer is an HTTP server whose clients fall silent when link, which carries all its
// connections, is frozen.
type silentServer struct {
	http.Server
	n     plainNet
	link  *frozenLink
	conns []net.Conn // the clients' ends

	mu     sync.Mutex
	states map[net.Conn]http.ConnState // of the server's ends
}

// These are requests of clients, and what follows from them at the server.
const (
	idleRequest    = "GET / HTTP/1.1\r\nHost: x\r\n\r\n"                                    // the connection is idle after the answer
	uploadRequest  = "POST /upload HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\nbegun" // the handler waits for the rest of the body
	endlessRequest = "GET /endless HTTP/1.1\r\nHost: x\r\n\r\n"                             // the handler writes until it cannot
)

// listenSilent returns a server that does not accept connections yet, and its listener.
func listenSilent(t testing.TB, n plainNet) (*silentServer, net.Listener) {
	t.Helper()
	ln, err := n.listen()
	require.NoError(t, err)
	return &silentServer{n: n, link: newFrozenLink(t, ln.Addr()), states: make(map[net.Conn]http.ConnState)}, ln
}

func serveSilent(t testing.TB, n plainNet) *silentServer {
	t.Helper()
	s, ln := listenSilent(t, n)
	s.ConnState = func(c net.Conn, state http.ConnState) {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.states[c] = state
	}
	mux := http.NewServeMux()
	mux.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
	mux.HandleFunc("/upload", func(w http.ResponseWriter, r *http.Request) { io.Copy(io.Discard, r.Body) })
	mux.HandleFunc("/endless", func(w http.ResponseWriter, r *http.Request) {
		for p, err := make([]byte, 64<<10), error(nil); err == nil; {
			_, err = w.Write(p)
		}
	})
	s.Handler = mux
	go s.Serve(ln)
	return s
}

// request makes new clients send one request each. They do not read the answers.
func (s *silentServer) request(t testing.TB, requests ...string) {
	t.Helper()
	for _, r := range requests {
		c, err := s.n.dial(tctx, "tcp4", s.link.ln.Addr().String())
		require.NoError(t, err)
		s.conns = append(s.conns, c)
		_, err = io.WriteString(c, r)
		require.NoError(t, err)
	}
}

// awaitReady waits until all clients are in the backlog of ln. The kernel does not tell so of TCP.
func (s *silentServer) awaitReady(t testing.TB, ln net.Listener) {
	t.Helper()
	if l, ok := ln.(*Listener); ok {
		require.True(t, eventually(func() bool { return len(l.ready) >= len(s.conns) }), "the backlog lacks clients")
	}
}

// await waits until want connections of the server are in a state.
func (s *silentServer) await(t testing.TB, state http.ConnState, want int) {
	t.Helper()
	require.True(t, eventually(func() bool { return s.in(state) == want }), "%d %v, %d wanted", s.in(state), state, want)
}

// awaitClosed waits until the server has closed all of its connections. It does not count
// them: in a busy guest a server has closed one more than expected once, and the cause is
// not known. A dial that was tried again would explain it.
func (s *silentServer) awaitClosed(t testing.TB) {
	t.Helper()
	for _, state := range []http.ConnState{http.StateNew, http.StateActive, http.StateIdle} {
		s.await(t, state, 0)
	}
}

func (s *silentServer) in(state http.ConnState) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, st := range s.states {
		if st == state {
			n++
		}
	}
	return n
}

// silence freezes the link when idle connections of the server are idle and active ones
// have a request that is not answered.
func (s *silentServer) silence(t testing.TB, idle, active int) {
	t.Helper()
	s.await(t, http.StateIdle, idle)
	s.await(t, http.StateActive, active)
	s.link.freeze(toListener, fromListener)
}

// closeClients closes the clients' ends.
func (s *silentServer) closeClients(t testing.TB) {
	t.Helper()
	var err error
	within(t, "the clients' Close", func() {
		for _, c := range s.conns {
			err = errors.Join(err, c.Close())
		}
	})
	require.NoError(t, err)
}

// Shutdown closes idle connections and returns, although their peers are silent. For
// connections with a request it waits until its context ends, and does not close them.
// Server.Close then ends them and their handlers.
func TestShutdownOfSilentPeers(t *testing.T) {
	eachPlainNet(t, func(t *testing.T, n plainNet) {
		for _, tt := range []struct {
			name     string
			requests []string
			idle     int
			want     error
		}{
			{"idle", []string{idleRequest, idleRequest, idleRequest, idleRequest}, 4, nil},
			{"in the middle of a request", []string{idleRequest, uploadRequest, idleRequest, endlessRequest}, 2, context.DeadlineExceeded},
		} {
			t.Run(tt.name, func(t *testing.T) {
				s := serveSilent(t, n)
				s.request(t, tt.requests...)
				s.silence(t, tt.idle, len(tt.requests)-tt.idle)
				ctx, cancel := context.WithTimeout(tctx, time.Second)
				defer cancel()
				var err error
				within(t, "Shutdown", func() { err = s.Shutdown(ctx) })
				require.ErrorIs(t, err, tt.want)
				s.await(t, http.StateIdle, 0)
				s.await(t, http.StateActive, len(tt.requests)-tt.idle)
				within(t, "Server.Close", func() { err = s.Close() })
				require.NoError(t, err)
				s.awaitClosed(t)
				s.closeClients(t)
			})
		}
	})
}

// Server.Close ends idle connections, those with a request, and one that was accepted and
// has no request yet.
func TestServerCloseOfSilentPeers(t *testing.T) {
	eachPlainNet(t, func(t *testing.T, n plainNet) {
		s := serveSilent(t, n)
		s.request(t, idleRequest, uploadRequest, idleRequest, endlessRequest, "")
		s.await(t, http.StateNew, 1)
		s.silence(t, 2, 2)
		var err error
		within(t, "Server.Close", func() { err = s.Close() })
		require.NoError(t, err)
		s.awaitClosed(t)
		s.closeClients(t)
	})
}

// Listener.Close does not wait for connections that nobody has accepted.
func TestListenerCloseOfSilentPeers(t *testing.T) {
	eachPlainNet(t, func(t *testing.T, n plainNet) {
		s, ln := listenSilent(t, n)
		s.request(t, make([]string, silentPeers)...)
		s.awaitReady(t, ln)
		s.link.freeze(toListener, fromListener)
		var err error
		within(t, "Listener.Close", func() { err = ln.Close() })
		require.NoError(t, err)
		_, err = ln.Accept()
		require.ErrorIs(t, err, net.ErrClosed)
		s.closeClients(t)
	})
}

// Requests to a server that answers go on while a Transport closes its connections to a
// silent one: by CloseIdleConnections, or because there are too many idle connections. The
// Transport closes the latter with its lock held.
func TestTransportWithSilentPeers(t *testing.T) {
	eachPlainNet(t, func(t *testing.T, n plainNet) {
		for _, many := range []bool{false, true} {
			t.Run(fmt.Sprintf("too many=%v", many), func(t *testing.T) {
				c := newSilentClient(t, n)
				silent, well := serveSilent(t, n), serveSilent(t, n)
				if many {
					c.tr.MaxIdleConns = silentPeers
				}
				require.NoError(t, c.get(silent, silentPeers))
				silent.silence(t, silentPeers, 0)
				before := c.closed()
				over := make(chan struct{})
				go func() {
					defer close(over)
					if !many {
						c.tr.CloseIdleConnections()
					}
				}()
				var err error
				within(t, "requests to a server that answers", func() {
					for more := true; more && err == nil; {
						err = c.get(well, silentPeers) // these connections take the place of the silent ones
						select {
						case <-over:
							more = c.closed() < before+silentPeers
						default:
						}
					}
				})
				require.NoError(t, err)
				within(t, "Server.Close", func() { err = silent.Close() })
				require.NoError(t, err)
				c.tr.CloseIdleConnections()
				require.NoError(t, well.Close())
			})
		}
	})
}

// silentClient is an HTTP client that counts the connections it has closed.
type silentClient struct {
	tr *http.Transport
	cl *http.Client

	mu   sync.Mutex
	gone int
}

func newSilentClient(t testing.TB, n plainNet) *silentClient {
	c := new(silentClient)
	c.tr = &http.Transport{MaxIdleConnsPerHost: silentPeers, DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
		nc, err := n.dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &closeSeen{Conn: nc, c: c}, nil
	}}
	c.cl = &http.Client{Transport: c.tr}
	t.Cleanup(c.tr.CloseIdleConnections)
	return c
}

// closed returns for how many connections Close has returned.
func (c *silentClient) closed() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.gone
}

// get makes requests, each on a connection of its own.
func (c *silentClient) get(s *silentServer, times int) error {
	answers, err := c.begin(s, times)
	return errors.Join(err, c.finish(answers))
}

// begin makes requests. Their answers have come when it returns, and the connections
// become idle when finish has read them.
func (c *silentClient) begin(s *silentServer, times int) (answers []*http.Response, err error) {
	for range times {
		resp, err := c.cl.Get("http://" + s.link.ln.Addr().String())
		if err != nil {
			return answers, err
		}
		answers = append(answers, resp)
	}
	return answers, nil
}

func (c *silentClient) finish(answers []*http.Response) (err error) {
	for _, resp := range answers {
		_, e := io.Copy(io.Discard, resp.Body)
		err = errors.Join(err, e, resp.Body.Close())
	}
	return err
}

// closeSeen is a connection of a silentClient.
type closeSeen struct {
	net.Conn
	c    *silentClient
	once sync.Once
}

func (s *closeSeen) Close() error {
	err := s.Conn.Close()
	s.once.Do(func() {
		s.c.mu.Lock()
		defer s.c.mu.Unlock()
		s.c.gone++
	})
	return err
}
