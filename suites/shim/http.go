package shim

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
)

func init() {
	http.DefaultTransport.(*http.Transport).DialContext = new(Dialer).DialContext
}

// Transport makes an http.Transport that has no dial function dial by shim.
func Transport(t *http.Transport) *http.Transport {
	//lint:ignore SA1019 Suites still set the field that is deprecated.
	if t.DialContext == nil && t.Dial == nil {
		t.DialContext = new(Dialer).DialContext
	}
	return t
}

// HTTPTestServer stands for httptest.NewServer.
func HTTPTestServer(h http.Handler) *httptest.Server {
	s := HTTPTestUnstartedServer(h)
	s.Start()
	return s
}

// HTTPTestTLSServer stands for httptest.NewTLSServer.
func HTTPTestTLSServer(h http.Handler) *httptest.Server {
	s := HTTPTestUnstartedServer(h)
	s.StartTLS()
	return s
}

// HTTPTestUnstartedServer stands for httptest.NewUnstartedServer.
func HTTPTestUnstartedServer(h http.Handler) *httptest.Server {
	l, err := Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic("shim: the server of a test cannot listen: " + err.Error())
	}
	s := httptest.NewUnstartedServer(h)
	s.Listener.Close()
	s.Listener = l
	return s
}

// HTTPTestClient is called with the result of every method Client without arguments, in
// files that import httptest. The client of an httptest.Server has its own dial function,
// and dials by shim from then on. (The parameter has the type any, because some modules use
// a version of Go without type parameters.)
func HTTPTestClient(client *http.Client) *http.Client {
	t, ok := client.Transport.(*http.Transport)
	if !ok || t.DialContext == nil {
		return client
	}
	if _, old := redirected.LoadOrStore(t, true); old {
		return client
	}
	dial := t.DialContext
	t.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		host, _, _ := net.SplitHostPort(addr)
		//lint:ignore SA1019 httptest heeds the field that is deprecated.
		if t.Dial != nil || host == "example.com" || strings.HasSuffix(host, ".example.com") {
			return dial(ctx, network, addr) // httptest knows these addresses.
		}
		return new(Dialer).DialContext(ctx, network, addr)
	}
	return client
}

// redirected has the transports that HTTPTestClient has changed.
var redirected sync.Map
