package rdmanet

import (
	"context"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/rdmanet/rdmanet/ibv/iwarp"
)

// BenchmarkSilentPeers is what four peers that are gone cost a program that uses net/http,
// over TCP and over the software device: the calls that close connections, and the
// slowest request to a server that is well while a Transport closes its connection to
// one that is gone. All in milliseconds.
func BenchmarkSilentPeers(b *testing.B) {
	const peers = 4
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { io.WriteString(w, "ok") })
	ms := func(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
	took := func(f func()) time.Duration {
		start := time.Now()
		f()
		return time.Since(start)
	}
	for _, network := range []string{"tcp", "rdma"} {
		b.Run(network, func(b *testing.B) {
			cfg := Config{Provider: iwarp.New(iwarp.Config{})}
			listen := func() net.Listener {
				var ln net.Listener
				var err error
				if network == "tcp" {
					ln, err = net.Listen("tcp4", "127.0.0.1:0")
				} else {
					ln, err = (&ListenConfig{Config: cfg}).Listen(tctx, "rdma4", "127.0.0.1:0")
				}
				if err != nil {
					b.Fatal(err)
				}
				return ln
			}
			dial := (&net.Dialer{}).DialContext
			if network == "rdma" {
				dial = (&Dialer{Config: cfg}).DialContext
			}
			// A server with peers that are gone after one request each.
			serve := func() (*http.Server, *http.Transport, *frozenLink) {
				ln := listen()
				srv := &http.Server{Handler: handler}
				go srv.Serve(ln)
				link := newFrozenLink(b, ln.Addr())
				tr := &http.Transport{DialContext: dial, MaxIdleConnsPerHost: peers}
				answers := make([]*http.Response, peers) // which keep their connections until all have one
				for i := range answers {
					resp, err := (&http.Client{Transport: tr}).Get("http://" + link.ln.Addr().String())
					if err != nil {
						b.Fatal(err)
					}
					answers[i] = resp
				}
				for _, resp := range answers {
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				time.Sleep(50 * time.Millisecond)
				link.freeze(toListener, fromListener)
				return srv, tr, link
			}
			worst := make(map[string]time.Duration)
			note := func(what string, d time.Duration) { worst[what] = max(worst[what], d) }
			for range b.N {
				srv, tr, _ := serve()
				note("CloseIdleConnections-ms", took(tr.CloseIdleConnections))
				note("Server.Close-ms", took(func() { srv.Close() }))
				srv, tr, _ = serve()
				ctx, cancel := context.WithTimeout(tctx, time.Second)
				note("Shutdown-ms", took(func() { srv.Shutdown(ctx) }))
				cancel()
				tr.CloseIdleConnections()

				ln := listen()
				link := newFrozenLink(b, ln.Addr())
				var waiting []net.Conn
				for range peers {
					c, err := dial(tctx, "tcp4", link.ln.Addr().String())
					if err != nil {
						b.Fatal(err)
					}
					waiting = append(waiting, c)
				}
				time.Sleep(50 * time.Millisecond)
				link.freeze(toListener, fromListener)
				note("Listener.Close-ms", took(func() { ln.Close() }))
				for _, c := range waiting {
					c.Close()
				}

				well := listen()
				good := &http.Server{Handler: handler}
				go good.Serve(well)
				gone := listen()
				bad := &http.Server{Handler: handler}
				go bad.Serve(gone)
				link = newFrozenLink(b, gone.Addr())
				tr = &http.Transport{DialContext: dial, IdleConnTimeout: 100 * time.Millisecond}
				cl := &http.Client{Transport: tr}
				get := func(addr net.Addr) {
					resp, err := cl.Get("http://" + addr.String())
					if err != nil {
						b.Fatal(err)
					}
					io.Copy(io.Discard, resp.Body)
					resp.Body.Close()
				}
				get(link.ln.Addr())
				link.freeze(toListener, fromListener)
				for start := time.Now(); time.Since(start) < 300*time.Millisecond; time.Sleep(time.Millisecond) {
					note("request-max-ms", took(func() { get(well.Addr()) }))
				}
				tr.CloseIdleConnections()
				good.Close()
				bad.Close()
			}
			for what, d := range worst {
				b.ReportMetric(ms(d), what)
			}
		})
	}
}
