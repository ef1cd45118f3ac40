package main

import (
	"go/parser"
	"go/token"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRewrite(t *testing.T) {
	for _, tt := range []struct{ name, in, out string }{
		{
			"what stands in the table",
			"package p\n\nimport \"net\"\n\nfunc f() {\n\tl, err := net.Listen(\"tcp\", \":0\")\n\t_ = l.(*net.TCPListener)\n\tvar a net.Addr = l.Addr()\n}\n",
			"package p; import rdmanetshim \"github.com/rdmanet/rdmanet/suites/shim\"\n\nimport \"net\"\n\nfunc f() {\n\tl, err := rdmanetshim.Listen(\"tcp\", \":0\")\n\t_ = l.(*rdmanetshim.TCPListener)\n\tvar a net.Addr = l.Addr()\n}\n",
		},
		{
			"an import that nothing uses any more",
			"package p\n\nimport (\n\t\"net\"\n\t\"io\"\n)\n\nvar d net.Dialer\nvar _ io.Reader\n",
			"package p; import rdmanetshim \"github.com/rdmanet/rdmanet/suites/shim\"\n\nimport (\n\t_ \"net\"\n\t\"io\"\n)\n\nvar d rdmanetshim.Dialer\nvar _ io.Reader\n",
		},
		{
			"an import by another name",
			"package p\n\nimport stdnet \"net\"\n\nvar c = stdnet.Dial\n",
			"package p; import rdmanetshim \"github.com/rdmanet/rdmanet/suites/shim\"\n\nimport _ \"net\"\n\nvar c = rdmanetshim.Dial\n",
		},
		{
			"clients and transports",
			"package p\n\nimport (\n\t\"net/http\"\n\t\"net/http/httptest\"\n)\n\nfunc f() {\n\ts := httptest.NewServer(nil)\n\t_ = s.Client().Do\n\t_ = &http.Transport{MaxIdleConns: 1}\n}\n",
			"package p; import rdmanetshim \"github.com/rdmanet/rdmanet/suites/shim\"\n\nimport (\n\t\"net/http\"\n\t_ \"net/http/httptest\"\n)\n\nfunc f() {\n\ts := rdmanetshim.HTTPTestServer(nil)\n\t_ = rdmanetshim.HTTPTestClient(s.Client()).Do\n\t_ = rdmanetshim.Transport(&http.Transport{MaxIdleConns: 1})\n}\n",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			out, err := rewrite("p.go", []byte(tt.in))
			require.NoError(t, err)
			require.Equal(t, tt.out, string(out))
			_, err = parser.ParseFile(token.NewFileSet(), "p.go", out, 0)
			require.NoError(t, err)
			require.Equal(t, strings.Count(tt.in, "\n"), strings.Count(string(out), "\n"), "lines keep their numbers")
		})
	}
}

// TestRewriteLeaves checks what only looks like a use of package net.
func TestRewriteLeaves(t *testing.T) {
	for _, in := range []string{
		"package p\n\nimport \"net\"\n\nvar a net.Addr\n",
		"package p\n\nimport \"net\"\n\nvar _ net.Addr\n\nfunc f(net T) { net.Dial() }\n",
		"package p\n\nimport \"example.com/net\"\n\nvar c = net.Dial\n",
		"package p\n\n// net.Dial\nvar s = \"net.Dial\"\n",
		"package p\n\nfunc f(x T) { x.Client() }\n",
	} {
		out, err := rewrite("p.go", []byte(in))
		require.NoError(t, err)
		require.Equal(t, in, string(out))
	}
}
