package main

import (
	"crypto/sha256"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"

	"github.com/rdmanet/rdmanet/examples/internal/demo"
)

// serve serves HTTP/1.1.
func serve(ln net.Listener, dir string) error {
	demo.Ready(ln.Addr().String())
	srv := http.Server{Handler: handler(dir)}
	return srv.Serve(ln)
}

// serveTLS serves HTTP/2 over TLS. The address that it announces ends in the fingerprint of
// its certificate. Clients accept that certificate only.
func serveTLS(ln net.Listener, dir string, cert tls.Certificate) error {
	demo.Ready(ln.Addr().String() + "#" + fingerprint(cert.Certificate[0]))
	srv := http.Server{
		Handler:   handler(dir),
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}},
	}
	return srv.ServeTLS(ln, "", "")
}

// handler serves the files of dir under /files/ and the SHA-256 of each, in
// hexadecimal, under /sha256/.
func handler(dir string) http.Handler {
	files := os.DirFS(dir)
	mux := http.NewServeMux()
	mux.Handle("GET /files/", http.StripPrefix("/files/", http.FileServerFS(files)))
	mux.HandleFunc("GET /sha256/{name...}", func(w http.ResponseWriter, r *http.Request) {
		f, err := files.Open(r.PathValue("name"))
		if err != nil {
			http.NotFound(w, r)
			return
		}
		defer f.Close()
		h := sha256.New()
		if _, err := io.Copy(h, f); err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintf(w, "%x", h.Sum(nil))
	})
	return mux
}
